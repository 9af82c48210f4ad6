"""Processes that run models, so that their crashes, hangs and memory are not those of the server.

    main process: ModelWorker -- one socket a thread (lane) --> worker process: server/app/model_process.py
                  RemoteModel: signature, decode and render of a model in a file, as if it were here

A worker has one model. Its control socket carries the descriptor of the shared memory, the model, and new lanes; each
lane is served by a thread of the worker, one request after the other. The lane of the device's thread loads the model
and runs its batches. The others decode and render. A worker ends when its control socket does, and with the thread that
started it, which lives as long as the main process.
"""
