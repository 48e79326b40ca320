"""The front door: each op's public function, its checks, its implementations, and which of them it prefers."""
