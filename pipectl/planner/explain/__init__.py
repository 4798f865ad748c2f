"""What is asked of a plan afterwards: where its time goes, and what changes would bring."""
