"""What clients' replies add up to, besides sums per channel.

`grams` are Gram matrices as messages, for refinements and updates that fit the data. `ballots` are
the baselines: clients that prune alone, and a server that counts what they kept.
"""
