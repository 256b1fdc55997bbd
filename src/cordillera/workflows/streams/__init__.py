"""Operations on streams of events."""
