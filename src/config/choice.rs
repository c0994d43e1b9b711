//! Enumerations whose variants are the words a key accepts.

/// Declares such enumerations: each variant once, with its word and its meaning.
macro_rules! choices {
    ($(
        #[doc = $about:literal]
        $Name:ident {
            $( #[doc = $doc:literal] $Variant:ident = $word:literal, )+
        }
    )+) => {$(
        #[doc = $about]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $Name {
            $( #[doc = $doc] $Variant, )+
        }

        impl $Name {
            pub const WORDS: &'static [(&'static str, Self)] = &[$( ($word, Self::$Variant), )+];

            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $( Self::$Variant => $word, )+
                }
            }
        }

        impl ::std::fmt::Display for $Name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.word())
            }
        }
    )+};
}

pub(super) use choices;
