"""Personal parts, fused over a graph of similar clients."""
