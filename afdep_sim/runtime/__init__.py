"""The GPU side: heaps, launches, graphs. Nothing here imports a GPU package before a machine is used."""
