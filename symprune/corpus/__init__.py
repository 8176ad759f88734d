"""Text that users have: files, data sets of the hub, conversations, and several of them mixed."""
