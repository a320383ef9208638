"""What the user's model is: captured, named and costed, without mesh or devices."""
