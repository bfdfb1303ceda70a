"""The fast clock, every batch: the layer, its routing, dispatch and experts."""
