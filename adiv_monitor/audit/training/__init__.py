"""What is trained, copies of it, and how: setups, their forks, batches, the loop."""
