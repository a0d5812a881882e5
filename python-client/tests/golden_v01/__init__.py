"""The stubs of version 0.1, kept as they were: what its clients and daemons speak."""
