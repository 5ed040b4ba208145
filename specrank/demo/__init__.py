"""The main job on real data: train, serve, replay, speculate, report."""
