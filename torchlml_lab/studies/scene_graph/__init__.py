"""Scene graphs: all relations of an image predicted jointly, on Visual Genome and on VRD."""
