"""The device under a member: whether it is healthy, whether it is slow, and how much power it may draw.

Nothing here knows of views or collectives. Whoever watches a device gets findings, and decides.
"""
