"""The journal of a run and the streams of frames to its readers."""
