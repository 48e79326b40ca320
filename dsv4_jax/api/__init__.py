"""The front door: an op's public function, its checks, its implementations, and which of them is taken where."""
