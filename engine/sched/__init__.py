"""The scheduler: who runs each node of a graph and why, where its tensors lie, and the run itself."""
