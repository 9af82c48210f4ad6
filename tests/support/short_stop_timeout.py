"""serve-model with a time limit of one second, in place of 15, for processes to stop.

Run as `python -m tests.support.short_stop_timeout ARGUMENTS`, with the arguments of serve-model.
"""

from server.app import gateway_hub, supervisor

gateway_hub._STOP_TIMEOUT = supervisor._STOP_TIMEOUT = 1.0

if __name__ == "__main__":
    from server.cli import main

    main()
