"""Rewards: answer scores, outcome shapes and evidence rewards, from text or log-probs to numbers per turn."""
