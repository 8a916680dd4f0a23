"""Training with one observed label per sample: LML compared with the methods designed for this setting."""
