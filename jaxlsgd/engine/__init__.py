"""The engine: draws, layout, loops, devices, cost."""
