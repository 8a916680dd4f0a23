"""Training with one observed label per sample: LML compared with methods designed for this setting."""
