"""What a run says of a model's quality besides perplexity."""
