"""ProxSkip and its sparse and personal relatives."""
