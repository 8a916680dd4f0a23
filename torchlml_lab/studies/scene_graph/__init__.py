"""Scene graphs: joint prediction of all relations in an image, on Visual Genome and VRD."""
