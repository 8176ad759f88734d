"""Handing a result on: doing a run again, pushing it to the hub, adding up parts of a sweep."""
