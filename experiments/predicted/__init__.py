"""Plans predicted and measured on devices that are here."""
