"""What the projection, its relatives, the losses and the metrics are built on; nothing here is public."""
