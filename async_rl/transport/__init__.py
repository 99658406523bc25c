"""Sockets behind small protocols: ZeroMQ, its in-memory twin for tests, the trainer's blocking link."""
