"""Reinforcement learning from rewards: groups of samples, their rewards, and rows to train on."""
