"""The connection between gateway processes, which speak HTTP, and the serving process, which has the devices.

    gateway: Inference -> FleetClient -> Channel ===== socket ===== Channel -> FleetServer -> Fleet    serving process
                              |    Slots ------- inputs in shared memory ------> (read only) |
                              |    StatePage <------ queue, readiness, revisions ------------|

Each gateway has a stream socket and a memory of slots of its own, both made when it connects. Arrays of inputs are in
slots, everything else is in messages. The serving process publishes its state in a page that all gateways read without
messages, so that a gateway rejects a call before it reads the body. The serving process admits calls finally.

What happens when a process dies:

- A gateway: the socket ends, and the serving process cancels its calls. Batches in service run on. The memory stays
  mapped until the last array on it is gone, and the next gateway gets a memory and a socket of its own, so that nothing
  has to be reclaimed.
- The serving process: the socket ends, and the calls of the gateway fail with 503. `FleetClient.connect` connects it to
  the next serving process, with another memory.

A gateway needs all modules but `fleet_server`. They import neither devices nor solvers, nor what these need.
"""
