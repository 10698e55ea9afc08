"""The model itself: loading, forward, sampling. The only place that imports torch or transformers."""
