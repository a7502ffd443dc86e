"""What several test files share: small models, servers, engines and inputs. Nothing here is a test."""
