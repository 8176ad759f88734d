"""Channels of a model in another order, folded into its weights: it computes what it did before.

`links` finds by trying which channels may change places, `inside` orders those of a block,
`residual` those of the hidden states of the whole model, and `moves` is what that does to weights.
"""
