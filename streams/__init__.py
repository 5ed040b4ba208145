"""The outside world of specrank: schema, events, requests, encoding, user log, embedding store and brokers."""
