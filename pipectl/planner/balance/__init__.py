"""The smallest largest stage load, with a proof: the objective of related work."""
