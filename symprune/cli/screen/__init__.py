"""What a terminal shows: tables in the width there is, bars, lines for a log."""
