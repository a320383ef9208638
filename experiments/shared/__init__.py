"""What more than one experiment stands on: rows on disk, compiled steps, timing, tables, a plain GPT."""
