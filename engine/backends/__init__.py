"""Built-in backends. Each registers through the entry-point group `engine.backends`, as plug-ins do."""
