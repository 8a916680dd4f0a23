"""The demo experiment: images of k digits with one observed label, and a comparison of five losses."""
