-- What the run is: it trains, or it evaluates one policy. NULL in journals of older versions.
ALTER TABLE run ADD COLUMN kind TEXT CHECK (kind IN ('training', 'evaluation'));
