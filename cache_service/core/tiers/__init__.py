"""Where a block can be beside the device: one module per tier."""
