"""Settings of the test process."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that SIGINT is ignored
