"""Error feedback: what compression left out is sent later."""
