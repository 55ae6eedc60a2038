"""Who is alive, who sits where, and which step counts: views, how members agree on them, and who ends whom."""
