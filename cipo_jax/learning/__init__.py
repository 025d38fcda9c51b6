"""Learning: turn rewards to advantages, an objective, and one jitted, donated update of the train state."""
