"""The demo's experiment: images of k digits, one of them named, and what five losses learn of the rest."""
