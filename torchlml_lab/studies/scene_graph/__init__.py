"""Scene graphs: joint prediction of all relations of an image, on Visual Genome and VRD."""
