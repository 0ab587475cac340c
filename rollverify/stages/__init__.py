"""Loop hooks: thin glue between the loop's state and the objects that do the work."""
