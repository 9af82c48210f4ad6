"""The tests' own ground, whoever starts them."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background inherits that it is ignored
