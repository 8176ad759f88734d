"""What the owner of a client decides, whatever a server asks: policy, privacy ledger, audit."""
