"""Models measured side by side: each in a process of its own, taking turns."""
