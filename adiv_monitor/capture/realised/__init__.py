"""What a step really did: its forward passes are noted, to be run again with the new weights."""
