"""The file format of checkpoints: manifest, safetensors files, JSON trees, and their verification."""
