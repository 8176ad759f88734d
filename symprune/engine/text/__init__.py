"""The tokens a run reads: drawn, begun with BOS where that is right, written by the model."""
